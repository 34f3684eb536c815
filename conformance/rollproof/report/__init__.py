"""Writing a run down: report.json is the source, the other files are made from it alone."""

from .files import SCHEMA_VERSION, report_json, schema, write

__all__ = ["SCHEMA_VERSION", "report_json", "schema", "write"]
