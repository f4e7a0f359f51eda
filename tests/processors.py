"""Simulates processors, so that every machine tests the operators that others use."""
from sampling.backends.cpu import bag_linear, lm_head, packed_linear

PROCESSORS = "Intel", "AMD", "others"


def simulate_processor(monkeypatch, name):
    """Let PackedGPT choose its operators as on this one of the PROCESSORS."""
    monkeypatch.setattr(packed_linear, "is_intel_cpu", lambda: name == "Intel")
    for module in bag_linear, lm_head, packed_linear:
        monkeypatch.setattr(module, "bags_are_faster", lambda: name == "AMD")
