"""Sequence mixing as pure functions: a recurrent form (the specification) beside a chunked form (the fast one)."""
