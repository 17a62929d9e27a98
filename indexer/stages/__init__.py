"""The stages of a build: functions of picklable values, which can run in any process."""
