# GPT-2 XL, OpenAI's largest, from Hugging Face: python sample.py config/gpt2.py --start="Once"
# Smaller and faster: --init_from=gpt2 (124M), gpt2-medium, gpt2-large.
init_from = 'gpt2-xl'
start = '<|endoftext|>' # in training, every document began with it
num_samples = 3
max_new_tokens = 200
