"""A small Kubernetes API server on loopback: a development tool, never a cluster.

It serves what Paceline's operator, node agent, `kubectl`, kopf and the official Python client use: discovery, CRUD, watches,
patches with field ownership, CRDs with schemas, garbage collection. No controllers, no admission, no CEL, no RBAC: one
token may do everything. Run it with `python -m paceline_local.apiserver --state DIR`.

```
server ── handlers ── operations ──┬─ patches, apply, fields   (what a patch means, pure)
   │          │                    ├─ schema, defaults, validation (what an object must be, pure)
   │       watches, tables,        ├─ lifecycle                (metadata rules of create, update, delete, pure)
   │       discovery               └─ store ── journal         (objects, revisions, watch window, durability)
certificates                          collector                (owner references, namespaces, CRDs, event TTL)
```
"""
