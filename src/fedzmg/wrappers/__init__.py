"""Wrappers: behaviour around any rule, such as clipping, schedules, projection and parts."""
