"""Which kernel takes each quantized module, and whether the engine that was named can load the checkpoint at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparkquant.engine.routing import CAPABILITIES, refusals, routes_of
from sparkquant.engine.rules import VERSIONS
from sparkquant.engine.versions import Engine
from sparkquant.report import Check
from sparkquant.verification.catalogue import finding, passed, skipped
from sparkquant.verification.loads import checkpoint_loads
from sparkquant.verification.ranks import unsplittable
from sparkquant.verification.subject import Subject


def check_kernels(subject: Subject) -> Iterator[Check]:
    """rules.engine and rules.kernel; without a named capability a module is refused when all of them refuse it."""
    yield from _engine(subject)
    if subject.declared is None:
        yield from skipped("config.json has no quantization_config", "rules.kernel")
        return
    serving = subject.serving
    engine = serving.engine or Engine(subject.version, subject.version)
    loads = list(checkpoint_loads(subject))
    capabilities = (serving.capability,) if serving.capability is not None else CAPABILITIES
    others, apart = capabilities[1:], unsplittable(subject, serving.tp)
    table = routes_of(loads, engine, serving.tp, capabilities[0], elsewhere=others, unsplittable=apart)
    refused = [refusals(loads, engine, serving.tp, capability) for capability in capabilities]
    everywhere = {name: reason for name, reason in refused[0].items() if all(name in other for other in refused)}
    if everywhere:
        name, reason = next(iter(everywhere.items()))
        what = f"{name} on {capabilities[0]}: {reason}"
        yield finding("rules.kernel", what, everywhere, measured=table.as_json())
    else:
        yield passed("rules.kernel", measured=table.as_json())


def _engine(subject: Subject) -> Iterator[Check]:
    if subject.serving.engine is None:
        good = [version for version in VERSIONS if not subject.unloadable(version)]
        yield from skipped(f"no engine version was named; of those known {_listed(good)}", "rules.engine")
    elif subject.layout is None:
        yield from skipped("no layout knows this model_type", "rules.engine")
    elif absence := subject.layout.absent_in(subject.version):
        yield finding("rules.engine", f"vLLM {subject.version}: {absence}")
    else:
        plain = {
            name: reason
            for name, placement in subject.placements.items()
            if subject.modules[name].is_quantized and (reason := placement.rule.plain_in(subject.version))
        }
        if plain:
            what = f"vLLM {subject.version} loads these in 16 bits only: {next(iter(plain.values()))}"
            yield finding("rules.engine", what, plain)


def _listed(versions: Sequence[str]) -> str:
    return f"{', '.join(versions)} can load it" if versions else "none can load it"
