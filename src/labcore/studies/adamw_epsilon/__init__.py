"""The experiments of the chapter on AdamW's epsilon."""
