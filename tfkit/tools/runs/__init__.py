"""Comparison of runs that belong to no sweep: grouped into variants, and compared as in a sweep."""
