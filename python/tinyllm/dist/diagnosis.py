"""Who disagrees, who waits for whom, and whose fault it is: functions of what the board says.

Ranks and parent call the same functions on the same entries, so that they come to the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tinyllm.dist.board import FAILED, RECEIVING, RETURNED, SENDING, STARTING, Entry
from tinyllm.dist.frame import Frame

ADVICE = (
    "All ranks must call the same collectives in the same order, with the same shapes, dtypes, op"
    "\nand src, and receive between the same two of them what was sent between them"
)


class Dispute(NamedTuple):
    """Ranks that are not in the same call: each group's ranks and what they do, largest first."""

    groups: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks of the smallest group, where it is smaller than the others; else none."""
        (most, _), *_, (fewest, _) = self.groups
        return fewest if len(fewest) < len(most) else ()

    @property
    def culprit(self) -> int | None:
        """The one culprit, if there is one."""
        return self.culprits[0] if len(self.culprits) == 1 else None

    def __str__(self) -> str:
        lines = "".join(f"\n  {named(ranks)}: {what}" for ranks, what in self.groups)
        odd = f"{named(self.culprits)} against the rest\n".capitalize() if self.culprits else ""
        return f"the ranks are not in the same call{lines}\n{odd}{ADVICE}"


# -- do they disagree? -----------------------------------------------------------------------------


def dispute(entries: Sequence[Entry]) -> Dispute | None:
    """Whether the ranks are not in the same call: certain, whenever each of the slots was read.

    The k-th collective is the same on every rank, or somebody is wrong; a rank that has returned
    will not call another, and one that is past a collective will not send or receive what stands
    before it; and a message that was refused was not what its sender should be at.
    """
    return _same_number(entries) or _returned(entries) or _missed(entries) or _refused(entries)


def _same_number(entries: Sequence[Entry]) -> Dispute | None:
    facts = [(entry.rank, entry.frame) for entry in entries if entry.frame]
    facts += [entry.testimony for entry in entries if entry.testimony]
    calls = [(rank, frame) for rank, frame in facts if frame.is_collective]
    calls.sort(key=lambda call: (call[1].seq, call[1].dtype is None))
    groups: dict[Frame, set[int]] = {}
    for index, (rank, frame) in enumerate(calls):
        groups.setdefault(_common(frame, groups), set()).add(rank)
        if index + 1 == len(calls) or calls[index + 1][1].seq != frame.seq:
            if len(groups) > 1:
                return _dispute({str(call): ranks for call, ranks in groups.items()})
            groups = {}
    return None


def _common(frame: Frame, known: dict[Frame, set[int]]) -> Frame:
    """What the headers of all ranks in this call have in common."""
    if frame.op == "all_gather":
        return frame._replace(shape=())
    if frame.op == "broadcast" and frame.dtype is None:  # a rank that takes whatever array comes
        same = [call for call in known if call._replace(dtype=None, shape=()) == frame]
        return same[0] if same else frame
    return frame


def _returned(entries: Sequence[Entry]) -> Dispute | None:
    for gone in entries:
        on = [e for e in entries if e.is_in_collective and e.collectives > gone.collectives]
        if gone.doing == RETURNED and on:
            calls = ", ".join(sorted({str(entry.frame) for entry in on}))
            left = {e.rank for e in entries if e.whereabouts == gone.whereabouts}
            return _dispute({gone.whereabouts: left, f"went on to {calls}": {e.rank for e in on}})
    return None


def _missed(entries: Sequence[Entry]) -> Dispute | None:
    for entry in entries:
        frame = entry.frame
        if frame is None or frame.is_collective:
            continue
        peer = entries[frame.root]
        done = peer.sent if frame.op == "recv" else peer.received
        past = peer.doing == RETURNED or peer.collectives > frame.seq
        if past and done[entry.rank] < frame.nth:
            return _dispute({str(frame): {entry.rank}, peer.whereabouts: {peer.rank}})
    return None


def _refused(entries: Sequence[Entry]) -> Dispute | None:
    for entry in entries:
        if entry.testimony:
            witness, frame = entry.testimony
            return _dispute({str(entry.frame): {entry.rank}, str(frame): {witness}})
    return None


def unfinished(entries: Sequence[Entry]) -> Dispute | None:
    """What does not add up although all ranks returned: calls too few, messages never received."""
    if any(entry.broken for entry in entries):  # they know, and returned all the same
        return None
    counts: dict[str, set[int]] = {}
    for entry in entries:
        counts.setdefault(entry.whereabouts, set()).add(entry.rank)
    if len(counts) > 1:
        return _dispute(counts)
    for a in entries:
        for b in entries:
            sent, received = a.sent[b.rank], b.received[a.rank]
            if sent != received:
                said = {f"sent {sent} to rank {b.rank}": {a.rank}}
                return _dispute(said | {f"received {received} from rank {a.rank}": {b.rank}})
    return None


def _dispute(groups: dict[str, set[int]]) -> Dispute:
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), min(group[1])))
    return Dispute(tuple((tuple(sorted(ranks)), what) for what, ranks in ordered))


# -- who waits for whom? ---------------------------------------------------------------------------


def standstill(entries: Sequence[Entry], silent: Sequence[int] = ()) -> tuple[list[int], str]:
    """Who holds the others up, and a sentence about it.

    A ``silent`` rank, which claims to wait but shows no sign of life; else the minority of a
    dispute; else who does not wait, but is waited for; else a circle of waits, where nobody is.
    """
    if silent:
        return list(silent), f"{named(silent)} shows no sign of life: stopped, or stuck in C"
    known = dispute(entries)
    if known:
        return list(known.culprits), str(known)
    ring = cycle(entries)
    if ring:
        return [], drawn(entries, ring)
    at_work = [e.rank for e in entries if not e.waits and e.doing not in (RETURNED, FAILED)]
    awaited = {entry.peer for entry in entries if entry.waits}
    holding = [rank for rank in at_work if rank in awaited] or at_work
    if not holding:
        return [], ""
    starting = all(entries[rank].doing == STARTING for rank in holding)
    waited = ", and others wait" if awaited else ""
    return holding, f"{named(holding)} {'still starting' if starting else 'not done'}{waited}"


def cycle(entries: Sequence[Entry]) -> list[int]:
    """Ranks that wait for each other in a circle, each for the next; empty if there is none."""
    peers = {entry.rank: entry.peer for entry in entries if entry.waits}
    for start in peers:
        path = [start]
        while peers.get(path[-1], -1) not in (-1, *path):
            path.append(peers[path[-1]])
        if path[-1] in peers:
            return path[path.index(peers[path[-1]]) :]
    return []


def drawn(entries: Sequence[Entry], ring: Sequence[int]) -> str:
    """``0 → 1 → 2 → 0: each is sending and none receives``."""
    arrows = " → ".join(map(str, [*ring, ring[0]]))
    doing = {entry.doing for entry in entries if entry.rank in ring}
    if doing == {SENDING}:
        return f"{arrows}: each is sending and none receives"
    if doing == {RECEIVING}:
        return f"{arrows}: each is receiving and none sends"
    return f"{arrows}: each waits for the next"


def named(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0, 1 and 3``."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
