"""The on-disk format: records, snapshots, mapped files, and safe writing of files."""
