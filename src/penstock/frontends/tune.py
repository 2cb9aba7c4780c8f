"""The command `penstock tune`."""

from pathlib import Path

from penstock.frontends import options
from penstock.frontends.exits import reported


def tune(
    model: str = options.MODEL,
    dtype: options.Dtype = options.DTYPE,
    device: str | None = options.DEVICE,
    threads: int | None = options.THREADS,
    quick: bool = options.option(False, "Fewer sizes, one length, no measured memory.", "--quick"),
    seconds: float | None = options.option(
        None,
        "About how long to take, loading and memory aside: 240 by default, 40 with --quick.",
        metavar="S",
    ),
    show: bool = options.option(False, "Print the stored profile, and measure nothing.", "--show"),
    plot: Path | None = options.on_output(None, "Draw a picture (needs matplotlib).", metavar="FILE"),
    json: Path | None = options.on_output(None, "Write what was found as JSON, too.", metavar="FILE"),
) -> None:
    """Measure this model on this machine, so that `--chunk auto` starts from it.

    Times steps, and whole prompts in chunks of several sizes, and measures memory; prints what was found and stores
    it in the cache folder. Best with nothing else running. Exits with 1 where --show finds no profile.
    """
    given = locals()
    with reported(tune):
        from penstock.errors import PenstockError, SettingError
        from penstock.files import require_outputs
        from penstock.frontends.answer import loaded, write
        from penstock.frontends.display import make_display

        if seconds is not None and not 0 < seconds < 1e6:
            raise SettingError("seconds", seconds, "a number of seconds above 0")
        settings = options.engine_settings(given)
        display = make_display()
        with display.busy("starting"):
            from penstock.engine.profile import load_profile, profile_key, profile_path, save_profile
            from penstock.measure import plots, report
            from penstock.measure.tune import to_json
            from penstock.measure.tune import tune as measure

        require_outputs({"plot": plot, "json": json})
        with loaded(model, display, settings) as llm:
            stored_at = profile_path(profile_key(llm))
            if not show:
                profile = measure(llm, seconds, display.note, quick=quick)
                save_profile(profile)
            elif (stored := load_profile(llm)) is not None:
                profile = stored
            else:
                raise PenstockError(
                    f"there is no profile of this model on this machine in {stored_at}: penstock tune makes one"
                )
        write(f"{report.render_tune(profile)}\n\nprofile: {stored_at}\n")
        if json is not None:
            json.write_text(to_json(profile))
            write(f"json:    {json}\n")
        if plot is not None:
            plots.draw_tune(profile, plot)
            write(f"plot:    {plot}\n")
