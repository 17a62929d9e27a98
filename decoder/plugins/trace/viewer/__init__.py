"""The page that shows a trace: text by source, the tree of each pass, and rejected drafts."""
