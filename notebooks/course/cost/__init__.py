"""What a step costs, counted, predicted and measured; and tplab beside its peers: ``python -m course bench``."""
