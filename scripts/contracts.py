"""A contract that import-linter lacks: of third-party packages, only the listed are imported."""

import sys
from typing import Any

from importlinter import Contract, ContractCheck, fields, output


class OnlyThirdParty(Contract):
    """``package`` imports the standard library, itself, and ``allowed``; nothing else."""

    type_name = "only_third_party"

    package = fields.StringField()
    allowed = fields.SetField(subfield=fields.StringField())

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        """Look at the direct imports of the package and all below it."""
        package: str = self.package  # type: ignore[assignment]
        known = {package, *self.allowed, *sys.stdlib_module_names}  # type: ignore[misc]
        forbidden = sorted(
            (module, imported)
            for module in {package, *graph.find_descendants(package)}
            for imported in graph.find_modules_directly_imported_by(module)
            if imported.partition(".")[0] not in known
        )
        return ContractCheck(kept=not forbidden, metadata={"forbidden": forbidden})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Name each import that is one too many."""
        for module, imported in check.metadata["forbidden"]:
            output.print_error(f"{module} imports {imported}")
