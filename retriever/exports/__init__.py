"""Indexes as files that engines draft from by themselves."""
