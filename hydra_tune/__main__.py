"""`python -m hydra_tune` is `hydra-tune`."""

from hydra_tune.cli.app import main

main()
