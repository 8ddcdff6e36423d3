"""What the tuned model gained: base and tuned measured alike with lm-evaluation-harness, compared, and reported."""

import sft  # noqa: F401 (takes the working directory off sys.path)
