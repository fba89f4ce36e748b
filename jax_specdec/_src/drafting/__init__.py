"""Where drafts come from: a smaller model, or the sequence's own past."""
