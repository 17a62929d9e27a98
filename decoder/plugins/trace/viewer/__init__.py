"""The page that shows a trace: text by source, the tree of each pass, and what was in vain."""
