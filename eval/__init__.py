"""What the tuned model gained: base and tuned measured alike with lm-evaluation-harness, compared, and reported."""
