"""`slotfile top`: a live view of a running server, from what its endpoints say."""
