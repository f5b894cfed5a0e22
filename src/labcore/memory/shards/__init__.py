"""Training data in large files: webdataset shards and TFRecord, with damage found or skipped."""
