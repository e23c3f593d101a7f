"""Keeps a run going on several hosts: one agent per host starts its ranks, and any of them can take the lead.

No single host is required: each agent writes one small file that all of them read, and the first agent that is alive
decides.
"""
