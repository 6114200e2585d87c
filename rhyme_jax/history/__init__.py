"""What earlier rollouts teach: responses, rewards and lengths by prompt."""
