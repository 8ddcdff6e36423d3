"""What a model name stands for: a folder or a commit on the hub, and the code that it ships."""

import logging

# On a CPU bitsandbytes warns about a kernel that is not used here when peft imports it, and at each call of an int8 layer about its dtype.
for _module in ("backends.cpu.ops", "autograd._functions"):
    logging.getLogger(f"bitsandbytes.{_module}").setLevel(logging.ERROR)
