"""A script with settings, for the tests of the configurator."""
SOURCE = '''"""A script."""
import math
text = "\\n" # any text
count = 10 # a whole number
rate = 0.8 # how fast, # how far
top: int | None = 200 # may be off
flag = False # on or off
ends: str | list | None = None # a text, or several
pick: int | str = 7 # a number, or a word

def main():
    inner = 3 # not a setting
'''
DEFAULTS = {"text": "\n", "count": 10, "rate": 0.8, "top": 200, "flag": False, "ends": None, "pick": 7}
