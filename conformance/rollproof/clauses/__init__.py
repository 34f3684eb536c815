"""The checks, one file a family. ``pytest --pyargs rollproof.clauses --rollout ...`` runs them.

A check is an async function of a Session. It returns a message for a pass and raises FailureError,
NotApplicableError or UnderpoweredError otherwise. clauses.toml says which clause it belongs to.
"""
