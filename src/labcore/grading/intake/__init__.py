"""Collects what students handed in, in any form, as one list of notebooks."""
