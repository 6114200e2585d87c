"""HistoPipe: where and when each prompt is rolled out."""
