"""Keeps a run going on several hosts: one agent per host starts its ranks, and any of them can take the lead.

There is no host that the others need: each agent writes one small file that all of them read, and the first that is
alive decides.
"""
