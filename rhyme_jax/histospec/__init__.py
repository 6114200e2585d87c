"""HistoSpec: rollouts that verify drafts taken from earlier responses, token for token equal to plain decoding."""
