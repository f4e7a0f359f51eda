# GPT-2 XL, the largest GPT-2, from Hugging Face: python sample.py config/gpt2.py --start="Once"
# Smaller and faster models: --init_from=gpt2 (124M), gpt2-medium, gpt2-large.
init_from = 'gpt2-xl'
start = '<|endoftext|>' # in GPT-2's training data, it separates documents
num_samples = 3
max_new_tokens = 200
