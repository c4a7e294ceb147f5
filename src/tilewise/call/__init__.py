"""One description of a call: its options (`fields`)."""
