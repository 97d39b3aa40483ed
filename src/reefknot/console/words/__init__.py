"""Words for people: audited events, retry policies and sources in sentences, the same on a terminal and on a page."""
