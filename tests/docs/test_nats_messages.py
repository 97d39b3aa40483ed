"""The page of messages on NATS names what is on the wire, with its figures."""

from pathlib import Path

from reefknot.queue.model import messages
from reefknot.stores.jetstream import assignments, listeners, transport

PAGE = (Path(__file__).parents[2] / "docs/reference/nats-messages.md").read_text(encoding="utf-8")


def test_the_page_has_every_name_and_figure() -> None:
    names = (
        *(messages.ASSIGN, messages.ACK, messages.RESULT, messages.CANCEL, messages.HEARTBEAT, messages.FLEET),
        messages.assign_subject("WORKER"),
        *(transport.MESSAGE_ID, transport.MARK, transport.HEADERS, assignments.CONSUMER),
    )
    figures = (
        f"at\nmost {assignments.MOST_ASSIGNMENTS:,} messages",
        f"within {assignments.ACK_WAIT_S:g} s",
        f"not heard of for {listeners.FORGET_AFTER_S:g} s",
        f"up to {transport.LARGEST >> 20} MiB",
        f"beyond {transport.MOST_UNREAD:,} unread",
    )
    assert [text for text in (*(f"`{name}`" for name in names), *figures) if text not in PAGE] == []
