"""The tuner: watches the pods of a service, asks the twin for better knobs, proves them on one pod, and takes them back.

```
 scrape ─▶ ledger ─▶ view ─┬─▶ question ─▶ decide (twin, in a process of its own) ─┐
   ▲                       └─▶ evidence (guard) ────────────────────┐              │
   │                                                                ▼              ▼
 pods ◀── PATCH (knob sync) ◀── ConfigMap <name>-tuned ◀── effects ◀── machine (pure)
```

Everything but `scrape`, `overrides` and `loop` is pure: data and the time in, data out.
"""
