"""What there is room for: the bounds on the number of those that wait, as functions of the numbers that are there."""


def over_queue(n_live: int, n_new: int, n_slots: int, max_queue: int) -> int:
    """How many more would wait than the queue holds; 0 where there is room. Those for whom slots are free do not wait."""
    return max(0, n_live + n_new - n_slots - max_queue)


def waiting_of_client(n_own: int, n_new: int, n_live: int, n_slots: int) -> int:
    """How many of a client's would wait, of whose `n_own` wait now: none while slots are free."""
    return max(0, min(n_own + n_new, n_live + n_new - n_slots))
