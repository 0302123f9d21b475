"""A small Kubernetes API server on loopback: a development tool, never a cluster.

It serves what Paceline's operator, node agent, `kubectl`, kopf and the official Python client use: discovery, CRUD, watches,
patches with field ownership, CRDs with schemas, garbage collection. No controllers, no admission, no CEL, no RBAC: one
token may do everything. Run it with `python -m paceline_local.apiserver --state DIR`.

What else differs: no protobuf bodies (`kubectl create KIND` sends them, `apply` doesn't); unknown fields of built-in kinds
are kept, and their deeper validation is missing; `limit` and `continue` are ignored; no aggregation, no watch by path.

```
server ── handlers ── operations ──┬─ patches, apply, fields   (what a patch means, pure)
   │          │                    ├─ schema, defaults, validation (what an object must be, pure)
   │       watches, tables,        ├─ lifecycle                (metadata rules of create, update, delete, pure)
   │       discovery               └─ store ── journal         (objects, revisions, watch window, durability)
certificates                          collector                (owner references, namespaces, CRDs, event TTL)
```
"""
