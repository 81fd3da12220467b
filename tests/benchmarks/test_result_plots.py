"""The plots show what their result files have."""

from adamae.benchmarks import result_plots
from adamae.benchmarks.harness import Row


def test_plots_show_every_loader_and_the_bound() -> None:
    figure = result_plots.plot_loading(result_plots.read_rows(result_plots.LOADING))
    assert len(figure.axes) == 3
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert {"adamae", "spdl", "torchcodec", "decord"} <= set(names)
        assert "decoding" not in names
        assert len(axes.lines) == 1, "the bound"
    # The last bar is the one on top.
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    assert widths[-1] == max(widths)


def test_the_memory_plot_shows_what_there_is() -> None:
    predicted: Row = {
        "mask_ratio": 0.9,
        "batch_size": 16,
        "activation_checkpointing": False,
        "predicted_peak_gib": 4.0,
    }
    # A GiB in the paper's unit.
    of_paper = predicted | {"mask_ratio": 0.8, "paper_gb": 2**30 / 1e9}
    (axes,) = result_plots.plot_memory([predicted, of_paper]).axes
    paper_line, predicted_line = axes.lines
    assert paper_line.get_label().startswith("the paper's code on its GPUs")
    assert paper_line.get_xydata().tolist() == [[0.8, 1.0]]
    assert predicted_line.get_label() == "predicted"
    assert predicted_line.get_xydata().tolist() == [[0.8, 4.0], [0.9, 4.0]]
    assert "GiB" in axes.get_ylabel()
