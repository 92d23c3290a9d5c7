"""`invert`: find a field from measurements. Its operators, measurements and priors."""
