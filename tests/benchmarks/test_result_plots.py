from adamae.benchmarks import result_plots


def test_plots_show_every_loader_and_the_bound() -> None:
    figure = result_plots.plot_loading(result_plots.read_rows(result_plots.LOADING))
    assert len(figure.axes) == 3
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert {"adamae", "spdl", "torchcodec", "decord"} <= set(names)
        assert "decoding" not in names
        assert len(axes.lines) == 1, "the bound"
    fastest = figure.axes[0].patches[-1].get_width()
    assert fastest == max(patch.get_width() for patch in figure.axes[0].patches)


def test_the_memory_plot_shows_what_there_is() -> None:
    common = {
        "mask_ratio": 0.9,
        "batch_size": 16,
        "activation_checkpointing": False,
        "predicted_peak_gib": 4.0,
    }
    (axes,) = result_plots.plot_memory(
        [common, common | {"mask_ratio": 0.8, "paper_gb": 2**30 / 1e9}]
    ).axes
    assert [line.get_label().partition(" (")[0] for line in axes.lines] == [
        "the paper's code on its GPUs",
        "predicted",
    ]
    assert [line.get_xydata().tolist() for line in axes.lines] == [
        [[0.8, 1.0]],
        [[0.8, 4.0], [0.9, 4.0]],
    ]
    assert "GiB" in axes.get_ylabel()
