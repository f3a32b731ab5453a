"""Matched pairs: which of two configurations is faster, or that it cannot be said.

    plan -> leg (a fresh process) -> record (grows leg by leg) -> proof, analysis -> report, plot
                 |                                                      |
         worker, windows                              statistics <- simulate

A *leg* is one fresh engine process that answers some prompts (`worker`) or runs windows of a routing trace (`windows`);
a *pair* is two legs, one of each arm, one right after the other on the same prompts or windows. Knows no command line:
`warmset.cli.ab`, `ab_parse`, `ab_arms` and `ab_windows` turn texts into arms.
"""
