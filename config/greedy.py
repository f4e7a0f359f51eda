# The one likeliest continuation, token by token: no chance in it, so one sample shows all.
temperature = 0.0
num_samples = 1
