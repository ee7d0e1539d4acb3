"""Helpers of the tests: ranks as forked processes, small models, captured graphs."""
