"""What an installation may lack: delete a folder, and the rest works."""
