"""Standard errors for the parameters of a differentiable model, by twins whose samples are redrawn."""
