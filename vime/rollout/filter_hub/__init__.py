"""Filters of groups that come with vime, for --dynamic-sampling-filter-path."""
