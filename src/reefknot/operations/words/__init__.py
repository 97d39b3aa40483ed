"""Words for people: audited events and retry policies in sentences, the same on a terminal and on a page."""
