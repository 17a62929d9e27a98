"""The format on disk: records, snapshots, mapped files, and writing files safely."""
