"""The picture as rich draws it: which columns a width has room for, which rows a height, and how both look.

Names come from clients: everything is `Text`, in which no markup counts, and control characters stay out.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Group, JustifyMethod, OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from runner.terminal.render import printable
from runner.terminal.top.view import ANOTHER, OTHERS, ClientRow, QueueRow, SlotRow, View

MIB: Final = 1 << 20
NARROW, WIDE = 64, 100  # below: only what is looked at first; from there on: ids and ages too
NARROWEST: Final = 38
NOT_READY: Final = "not ready"
GAP: Final = "  "
EIGHTHS: Final = "▁▂▃▄▅▆▇█"
RATES: Final = "decode 12,345 tokens/s   prompt 12,345 tokens/s "
TRAIL_WIDTH: Final = 30
BAR_WIDTHS: Final = (8, 40)
TIER_STYLES: Final = {"high": "bold magenta", "normal": "", "low": "cyan", "batch": "bright_black"}
STATE_STYLES: Final = {"decode": "green", "prefill": "yellow", "parked": "magenta", "queued": "", "idle": "bright_black"}
HEALTH_STYLES: Final = {"ok": "bold green", "restarting": "bold yellow", "draining": "bold yellow"}
CACHED, COMPUTED, GENERATED, KEPT, ROOM = "blue", "yellow", "green", "bright_black", "bright_black"


@dataclass(frozen=True, slots=True)
class Sheet:
    """What is drawn on. `height` None: as long as it gets."""

    width: int
    height: int | None = None
    has_unicode: bool = True

    @property
    def is_narrow(self) -> bool:
        """Room for what matters most."""
        return self.width < NARROW

    @property
    def is_wide(self) -> bool:
        """Room for everything."""
        return self.width >= WIDE


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `ratio`: takes its part of the width that the others leave."""

    title: str
    ratio: int | None = None
    is_number: bool = False


def draw(view: View | None, url: str, trouble: str | None, sheet: Sheet, keys: str = "") -> RenderableType:
    """The whole picture. `trouble` is why it is not of now; `keys` is the line that says what can be typed."""
    health = view.health if view is not None and trouble is None else NOT_READY
    top: list[RenderableType] = [*_head(view, url, health, sheet)]
    if trouble is not None:
        top += [Text(line, "bold red", no_wrap=True) for line in textwrap.wrap(printable(trouble), sheet.width)]
    bottom: list[RenderableType] = [Text(""), *_footer(view, keys, sheet)] if keys else []
    return Group(*top, *(_body(view, sheet, len(top) + len(bottom)) if view is not None else []), *bottom)


def share_out(room: int, wants: Sequence[int]) -> list[int]:
    """Rows for lists of these lengths: nobody gets more than it wants, and who wants much gets what the others leave, in equal parts."""
    given = [0] * len(wants)
    for n_left, index in zip(range(len(wants), 0, -1), sorted(range(len(wants)), key=lambda index: wants[index]), strict=True):
        given[index] = min(wants[index], max(0, room) // n_left)
        room -= given[index]
    return given


def duration(seconds: float) -> str:
    """`4.2 s`, `42 s`, `17 min`, `3.5 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def rate(tokens_per_s: float | None) -> str:
    """`12.3`, `1,234`, `-` where it is not known."""
    if tokens_per_s is None:
        return "-"
    return f"{tokens_per_s:.1f}" if tokens_per_s < 99.95 else f"{tokens_per_s:,.0f}"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last values as blocks, the greatest of them as a whole one; what is not known is a gap."""
    shown = list(values)[-width:] if width else []
    top = max((value for value in shown if value is not None), default=0.0)
    blocks = (" " if value is None else EIGHTHS[round(value / top * (len(EIGHTHS) - 1))] if top else EIGHTHS[0] for value in shown)
    return "".join(blocks).rjust(width)


def bar(row: SlotRow, width: int, *, has_unicode: bool) -> Text:
    """How full a slot is, and with what: tokens that were there, prompt that was computed, answer. Each end is rounded, so they add up."""
    full, empty = ("━", "─") if has_unicode else ("#", "-")
    parts = ((row.n_cached, CACHED), (row.n_computed, COMPUTED), (row.n_generated, GENERATED)) if row.state != "idle" else ()
    text, n_tokens, n_drawn = Text(), 0, 0
    for n, style in (*parts, (row.n_cells - sum(n for n, _ in parts), KEPT)):
        n_tokens += max(0, n)
        end = min(width, round(n_tokens / row.n_ctx * width)) if row.n_ctx else 0
        text.append(full * (end - n_drawn), style)
        n_drawn = end
    return text.append(empty * (width - n_drawn), f"dim {ROOM}")


def _head(view: View | None, url: str, health: str, sheet: Sheet) -> list[Text]:
    dot = "●" if sheet.has_unicode else "*"
    items = [Text("slotfile top", "bold"), Text(f"{dot} {printable(health)}", HEALTH_STYLES.get(health, "bold red"))]
    if not sheet.is_narrow:
        items += [Text(printable(view.model), "cyan")] if view is not None else []
        items += [Text(url, "bright_black")]
    return _flow(items, sheet)


def _body(view: View, sheet: Sheet, n_used: int) -> list[RenderableType]:
    """The rows of the tables get the lines that all else leaves: a gap and a head for each table, and the lines above and below."""
    figures = _figures(view, sheet)
    sections: tuple[tuple[list[Text], list[Column], list[list[Text]]], ...]
    sections = (([], *_slots(view, sheet)), (_tiers(view, sheet), *_queue(view, sheet)), ([], *_clients(view, sheet)))
    n_fixed = n_used + len(figures) + sum(len(title) + 1 + bool(rows) for title, _, rows in sections)
    wants = [len(rows) for *_, rows in sections]
    given = wants if sheet.height is None else share_out(sheet.height - n_fixed, wants)
    parts: list[RenderableType] = list(figures)
    for (title, columns, rows), n_rows in zip(sections, given, strict=True):
        parts += [Text(""), *title, *_table(columns, rows, n_rows, sheet)]
    return parts


def _figures(view: View, sheet: Sheet) -> list[Text]:
    has_trail = sheet.has_unicode and not sheet.is_narrow and len(view.trail) > 1
    width = min(TRAIL_WIDTH, (sheet.width - len(RATES)) // 2) if has_trail else 0
    rates = (
        _rate("decode", view.rates.decode, sparkline([past.decode for past in view.trail], width), GENERATED),
        _rate("prompt", view.rates.prompt, sparkline([past.prompt for past in view.trail], width), COMPUTED),
    )
    pairs = [("running", f"{view.n_running}/{len(view.slots)}"), ("waiting", f"{view.n_waiting:,}"), ("parked", f"{view.n_parked:,}")]
    pairs += [("KV", f"{view.kv_share:.0%}")]
    if not sheet.is_narrow:
        pairs += [("parked KV", f"{view.parked_bytes / MIB:,.1f} MiB")] if view.n_parked else []
        pairs += [("from cache", f"{view.cached_share:.0%}")] if view.cached_share is not None else []
    pairs += [("engine restarts", f"{view.n_restarts}")] if view.n_restarts else []
    return [*_flow(rates, sheet), *_flow([Text.assemble((f"{name} ", "bright_black"), (value, "bold")) for name, value in pairs], sheet)]


def _rate(name: str, value: float | None, trail: str, style: str) -> Text:
    return Text.assemble(
        (f"{name} ", "bright_black"), (f"{rate(value):>6}", f"bold {style}"), " tokens/s", (f" {trail}" if trail else "", style)
    )


def _slots(view: View, sheet: Sheet) -> tuple[list[Column], list[list[Text]]]:
    width = _bar_width(sheet)
    columns = [Column("SLOT", is_number=True), Column("STATE"), Column("TOKENS", is_number=True), Column(_fill_title(view, width))]
    columns += [Column("TOK/S", is_number=True)]
    columns += [] if sheet.is_narrow else [Column("TIER"), Column("CLIENT", ratio=2)]
    columns += [Column("AGE", is_number=True), Column("REQUEST", ratio=3)] if sheet.is_wide else []
    return columns, [_slot(row, width, sheet) for row in view.slots]


def _fill_title(view: View, width: int) -> str:
    n_ctx = max((row.n_ctx for row in view.slots), default=0)
    return next((title for title in (f"OF {n_ctx:,} TOKENS", f"OF {n_ctx:,}") if len(title) <= width), "FILL")


def _bar_width(sheet: Sheet) -> int:
    """A third of the width, but not beyond what can be read; on a narrow one what the other columns leave."""
    low, high = BAR_WIDTHS
    return min(high, max(low, sheet.width - 30 if sheet.is_narrow else sheet.width // 3 - 4))


def _slot(row: SlotRow, width: int, sheet: Sheet) -> list[Text]:
    style = STATE_STYLES.get(row.state, "")
    state = row.state if sheet.is_narrow or row.prompt_share is None else f"{row.state} {row.prompt_share:.0%}"
    is_busy = row.state != "idle"
    cells = [
        Text(str(row.slot_id)),
        Text(state.ljust(7 if sheet.is_narrow else 12), style),
        Text(f"{row.n_cells:,}", "" if is_busy else KEPT),
    ]
    cells += [bar(row, width, has_unicode=sheet.has_unicode), Text(rate(row.tokens_per_s) if is_busy else "", style)]
    if not sheet.is_narrow:
        cells += [_tier(row.tier), _client(row.client)]
    if sheet.is_wide:
        cells += [Text(duration(row.age_s) if row.age_s is not None else ""), Text(printable(row.request_id), "bright_black")]
    return cells


def _tiers(view: View, sheet: Sheet) -> list[Text]:
    items = [Text("QUEUE", "bold")]
    for tier, share in view.tiers.items():
        items.append(Text(f"{printable(tier)} {share.n_waiting:,}", TIER_STYLES.get(tier, "") if share.n_waiting else "bright_black"))
    if view.n_waiting and view.mean_wait_s is not None:
        items.append(Text.assemble(("mean wait ", "bright_black"), (duration(view.mean_wait_s), "bold")))
    if view.n_hidden:
        items.append(Text(f"{view.n_hidden:,} of other keys", "bright_black"))
    return _flow(items, sheet)


def _queue(view: View, sheet: Sheet) -> tuple[list[Column], list[list[Text]]]:
    if not view.queue:
        return [], []
    columns = [Column("PLACE", is_number=True), Column("TIER"), Column("STATE"), Column("AGE", is_number=True)]
    columns += [Column("WAIT", is_number=True)]
    columns += [Column("", ratio=1)] if sheet.is_narrow else [Column("PROMPT", is_number=True), Column("CLIENT", ratio=2)]
    columns += [Column("REQUEST", ratio=3)] if sheet.is_wide else []
    return columns, [_waiting(row, sheet) for row in view.queue]


def _waiting(row: QueueRow, sheet: Sheet) -> list[Text]:
    cells = [
        Text(f"{row.place:,}" if row.place is not None else "-", "bold"),
        _tier(row.tier),
        Text(row.state, STATE_STYLES.get(row.state, "")),
    ]
    cells += [Text(duration(row.age_s)), Text(duration(row.wait_s) if row.wait_s is not None else "-")]
    if not sheet.is_narrow:
        cells += [Text(f"{row.n_prompt:,}" if row.n_prompt else "-"), _client(row.client)]
    return cells + ([Text(printable(row.request_id), "bright_black")] if sheet.is_wide else [])


def _clients(view: View, sheet: Sheet) -> tuple[list[Column], list[list[Text]]]:
    if not view.clients:
        return [], []
    columns = [Column("CLIENT", ratio=1), Column("RUNNING", is_number=True), Column("WAITING", is_number=True)]
    columns += [Column("TOK/S", is_number=True), Column("SHARE", is_number=True)]
    columns += [] if sheet.is_narrow else [Column("")]
    return columns, [_share(row, sheet) for row in view.clients]


def _share(row: ClientRow, sheet: Sheet) -> list[Text]:
    share = row.share or 0.0
    cells = [_client(row.name), Text(f"{row.n_running:,}"), Text(f"{row.n_waiting:,}"), Text(rate(row.tokens_per_s), "green")]
    cells += [Text(f"{share:.0%}" if row.share is not None else "-")]
    width = _bar_width(sheet)
    full = "━" if sheet.has_unicode else "#"
    return cells + ([] if sheet.is_narrow else [Text((full * round(share * width)).ljust(width), GENERATED)])


def _table(columns: list[Column], rows: list[list[Text]], n_rows: int, sheet: Sheet) -> list[RenderableType]:
    """A head and so many rows; where rows are left out, the last one says how many. Too narrow a screen cuts the right side off."""
    if not rows:
        return []
    table = Table(box=None, width=max(sheet.width, NARROWEST), pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="bright_black")
    overflow: OverflowMethod = "ellipsis" if sheet.has_unicode else "crop"
    for column in columns:
        justify: JustifyMethod = "right" if column.is_number else "left"
        table.add_column(column.title, justify=justify, overflow=overflow, no_wrap=True, ratio=column.ratio)
    n_shown = len(rows) if n_rows >= len(rows) else max(0, n_rows - 1)
    for row in rows[:n_shown]:
        table.add_row(*row)
    n_left = len(rows) - n_shown
    return [table, Text(f"and {n_left:,} more", "bright_black")] if n_left else [table]


def _footer(view: View | None, keys: str, sheet: Sheet) -> list[Text]:
    items = [Text(keys, "bright_black")]
    if view is not None and sheet.has_unicode and not sheet.is_narrow:
        legend = (("cached", CACHED), ("prompt", COMPUTED), ("answer", GENERATED), ("kept", KEPT))
        items += [Text.assemble(("━━ ", style), (name, "bright_black")) for name, style in legend]
    return _flow(items, sheet)


def _flow(items: Iterable[Text], sheet: Sheet) -> list[Text]:
    """Lines of items with a gap between them, as many in each as have room."""
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + len(GAP) + item.cell_len <= sheet.width:
            lines[-1].append(GAP).append_text(item)
        else:
            lines.append(Text("", no_wrap=True, overflow="ellipsis" if sheet.has_unicode else "crop").append_text(item))
    return lines


def _tier(tier: str) -> Text:
    return Text(printable(tier), TIER_STYLES.get(tier, ""))


def _client(name: str) -> Text:
    return Text(printable(name), "bright_black" if name in (ANOTHER, OTHERS) else "")
