"""The stages of a build: functions of picklable values, which run in any process."""
