"""The entry point: how `--enable-hpkv` reaches SGLang.

Owns: `register` (called by SGLang's plugin loader in every process) and the route from flags to the
external linker:

    every process     flags on the parser; two resolution hooks that do nothing while off
    launcher, on      settings -> refusals -> dynamic linker declared, page size, switch exported
                      -> can pool and store be opened where they are to be
    scheduler, on     `radix.install` hooks the tree; the linker's constructor calls `verify_hooks`

Invariants: while off nothing of SGLang changes except its parser, and nothing heavy is imported.
While on, a hook that did not take is a start-up error: SGLang itself would only log it. Settings
travel in the linker's configuration, never through globals.

Threading: the main thread of each process, before it serves.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpkv_sglang import config
from hpkv_sglang.config import Settings
from hpkv_sglang.errors import HookError, HpkvError
from hpkv_sglang.hooks import Hook, HookType, register_all, verify
from hpkv_sglang.radix.hooked import SCHEDULER_MODULE, has_registry, hook_registry, registered

__all__ = ["register"]

logger = logging.getLogger(__name__)

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs."
_GIVEN = "_hpkv_flags"  # on ServerArgs: flags from the command line; SGLang pickles it along


def register() -> None:
    """Hook into SGLang in this process; calling it again does nothing.

    Raises SystemExit when the environment turns the plugin on and hooking fails: SGLang's loader
    swallows ordinary exceptions, and the server would start without the tier it was asked for.
    """
    if registered.done:
        return
    registered.done = True
    wanted = True
    try:
        wanted = config.switched_on()
        _register(wanted)
    except (HpkvError, ImportError, AttributeError, ValueError, TypeError) as error:
        if not wanted:
            raise
        raise SystemExit(f"hpkv_sglang: cannot hook into SGLang: {error}") from error


def _register(wanted: bool) -> None:
    registry, hook_types = hook_registry()
    hooks = (
        Hook(_SERVER_ARGS + "add_cli_args", _add_flags),
        Hook(_SERVER_ARGS + "from_cli_args", _keep_flags),
        Hook(_SERVER_ARGS + "check_server_args", _check_resolved),
    )
    registered.targets += register_all(registry, hook_types, hooks)
    _register_resolution_hooks()
    # A scheduler process has imported the scheduler before it loads plugins. Launcher, tokenizer
    # and detokenizer have not, and hooking the tree there would import it for nothing.
    if wanted and SCHEDULER_MODULE in sys.modules:
        from hpkv_sglang.radix.install import install

        def add(target: str, function: Callable[..., Any], kind: HookType) -> None:
            register_all(registry, hook_types, [Hook(target, function, kind)])

        registered.targets += install(add)
    if _nobody_will_apply():
        registry.apply_hooks()


def _nobody_will_apply() -> bool:
    """True when SGLang's loader is absent, or has already run: `register` was called by hand."""
    if not has_registry():
        return True
    from sglang.srt import plugins
    from sglang.srt.plugins import hook_registry as sglang_hooks

    by_hand = sglang_hooks._current_plugin_source.get() is None
    return by_hand and bool(plugins._plugins_loaded)


# ---- flags ----


def _add_flags(result: Any, parser: Any) -> Any:
    """AFTER ServerArgs.add_cli_args: all hooks are applied by now, so this is where to check."""
    registry, _ = hook_registry()
    verify(registry, registered.targets)
    config.add_flags(parser)
    return result


def _keep_flags(server_args: Any, _cls: type, namespace: Any) -> Any:
    """AFTER ServerArgs.from_cli_args: flags the dataclass does not know stay on the record."""
    given = config.flags_given(namespace)
    if given:
        setattr(server_args, _GIVEN, given)
    if given and not Settings.resolve(given).enabled:
        names = ", ".join(f.name for f in config.FLAGS if f.field in given)
        logger.warning("hpkv: %s given without --enable-hpkv: ignored", names)
    return server_args


def _settings_of(server_args: Any) -> Settings:
    return Settings.resolve(vars(server_args).get(_GIVEN, {}))


# ---- resolution ----


def _register_resolution_hooks() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    steps: dict[str, Callable[[Any, Callable[[Any], None]], None]] = {
        "handle_attention_backend_compatibility": _default_page_size,
        "handle_hicache": _turn_on,
        # The last step that can be hooked: speculation and backends are final here.
        "handle_model_capability_adjustments": _refuse_late,
    }
    for name, function in steps.items():
        register_resolution_hook(name)(function)


def _turn_on(server_args: Any, previous: Callable[[Any], None]) -> None:
    settings = _settings_of(server_args)
    if settings.enabled:
        from sglang.srt.arg_groups.overrides import declare_resolution

        from hpkv_sglang.radix.refusals import LINKER_MODULE

        _refuse(server_args)
        settings = replace(settings, launch_id=secrets.token_hex(16))
        declare_resolution(
            server_args,
            "hpkv",
            enable_unified_cache_external_linker=True,
            unified_cache_external_linker_backend="dynamic",
            unified_cache_external_linker_config={
                "linker": "HpkvLinker",
                "linker_module_path": LINKER_MODULE,
                "linker_extra_config": settings.to_dict(),
            },
        )
        config.export_switch()
    previous(server_args)


def _default_page_size(server_args: Any, previous: Callable[[Any], None]) -> None:
    previous(server_args)
    if not _settings_of(server_args).enabled:
        return
    from sglang.srt.arg_groups.model_override_base import attention_backends_of
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    from hpkv_sglang.radix.refusals import page_size_default

    view = resolving_view(server_args)
    page_size = page_size_default(view, attention_backends_of(view))
    if page_size is not None:
        declare_resolution(server_args, "hpkv", page_size=page_size)
        logger.info("hpkv: page size %d, because --page-size was not given", page_size)
    elif view.page_size is None:
        logger.info("hpkv: page size left to SGLang: backend or chunk size need another than 64")


def _refuse(server_args: Any) -> None:
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    from hpkv_sglang.radix.refusals import check_model, check_server_args

    view = resolving_view(server_args)
    check_server_args(view)
    check_model(model_config_of(server_args), view.device)


def _refuse_late(server_args: Any, previous: Callable[[Any], None]) -> None:
    previous(server_args)
    if _settings_of(server_args).enabled:
        _refuse(server_args)


def _check_resolved(result: Any, server_args: Any) -> Any:
    """AFTER ServerArgs.check_server_args, which every launcher calls before it spawns."""
    settings = _settings_of(server_args)
    if settings.enabled:
        from sglang.srt.arg_groups.overrides import resolving_view

        from hpkv_sglang.pool import check_places
        from hpkv_sglang.radix.refusals import LINKER_MODULE

        linker = resolving_view(server_args).unified_cache_external_linker_config or {}
        if linker.get("linker_module_path") != LINKER_MODULE:
            raise HookError.build(
                "resolving SGLang's arguments",
                "unified_cache_external_linker_config",
                linker,
                "--enable-hpkv did not arrive: another plugin replaced the step handle_hicache, or "
                "this version of SGLang differs.",
            )
        check_places(settings)
    return result
