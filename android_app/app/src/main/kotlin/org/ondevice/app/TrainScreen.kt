package org.ondevice.app

import android.os.Bundle
import android.text.InputType
import android.view.View
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.ProgressBar
import android.widget.Spinner
import android.widget.TextView
import org.ondevice.core.ArtifactInfo
import org.ondevice.core.Rules
import org.ondevice.core.Thermal
import org.ondevice.core.TrainerState

/** Sets a run up, shows how it goes, and says why it is paused. */
class TrainScreen(host: MainActivity) : Screen(host) {
    private val watcher: () -> Unit = ::changed
    private val anew: () -> Unit = {
        keepDraft()
        render()
    }
    private val values = LinkedHashMap<Int, TextView>()
    private var chart: ChartView? = null
    private var bar: ProgressBar? = null
    private var reasons: TextView? = null

    /** What kind of content is shown; while it stays the same, only the numbers change. */
    private var shown = ""
    private val draft = Bundle()

    override fun onShow() {
        app.jobs.watch(anew)
        app.runs.watch(watcher)
    }

    override fun onHide() {
        keepDraft()
        app.jobs.unwatch(anew)
        app.runs.unwatch(watcher)
    }

    override fun save(state: Bundle) {
        keepDraft()
        state.putAll(draft)
    }

    override fun restore(state: Bundle) {
        draft.putAll(state)
    }

    private fun kind(): String {
        val live = app.runs.live ?: return if (app.wanted.read() != null) "waiting" else "setup"
        return live.plan.id + when {
            live.isOver -> " over"
            live.pauseAsked -> " asked"
            live.state is TrainerState.Paused -> " paused"
            live.state == null -> " preparing"
            else -> " running"
        }
    }

    private fun changed() {
        if (kind() != shown) render() else app.runs.live?.let(::update)
    }

    override fun content(): View {
        shown = kind()
        values.clear()
        val live = app.runs.live
        return when {
            live == null && shown == "waiting" -> ui.page(R.id.page_train, ui.title(string(R.string.tab_train)), ui.busy(string(R.string.preparing)))
            live == null -> setup()
            else -> run(live)
        }
    }

    // Setting up

    private fun setup(): View {
        val models = app.store.models().filter { it.manifest != null }
        val data = app.store.trainable()
        val parts = arrayListOf<View>(ui.title(string(R.string.tab_train)))
        app.jobs.error(PLACE)?.let { parts += ui.problem(it) }
        if (models.isEmpty() || data.isEmpty()) {
            parts += ui.empty(R.string.nothing_to_train, R.string.nothing_to_train_words)
            val (label, tab) = if (models.isEmpty()) R.string.go_models to 0 else R.string.go_data to 1
            parts += ui.button(label, Tone.PRIMARY) { host.open(tab) }
            return ui.page(R.id.page_train, *parts.toTypedArray())
        }
        val names = data.map {
            when (it) {
                app.store.examples.file -> string(R.string.own_examples)
                app.store.judged.file -> string(R.string.judged_answers)
                else -> it.name
            }
        }
        val model = ui.spinner(R.id.model, models.map { it.name }, models.indexOfFirst { it.name == draft.getString("model") })
        val file = ui.spinner(R.id.data, names, data.indexOfFirst { app.store.nameOf(it) == draft.getString("data") })
        val number = InputType.TYPE_CLASS_NUMBER
        val steps = ui.field(R.id.steps, R.string.steps, number).apply { setText(draft.getString("steps") ?: "200") }
        val chosen = models[model.selectedItemPosition.coerceAtLeast(0)]
        val rate = ui.field(R.id.rate, R.string.rate, number or InputType.TYPE_NUMBER_FLAG_DECIMAL).apply {
            setText(draft.getString("rate") ?: "${chosen.manifest!!.method.learningRate}")
        }
        parts += ui.card(
            ui.labelled(R.string.model, model), ui.labelled(R.string.data, file),
            ui.row(ui.labelled(R.string.steps, steps), ui.labelled(R.string.rate, rate), gap = 12),
            ui.toggle(R.id.start_from, R.string.start_from, draft.getBoolean("start_from"), {}),
            gap = 10,
        )
        parts += rules()
        parts += ui.button(R.string.start, Tone.PRIMARY) { start(models, data.map(app.store::nameOf)) }.apply { id = R.id.start }
        return ui.page(R.id.page_train, *parts.toTypedArray())
    }

    private fun rules(): View {
        val words = THERMAL.map { string(R.string.heat_from, Words.thermal(host, it)) }
        val floors = FLOORS.map { if (it == 0) string(R.string.battery_any) else string(R.string.battery_below, it) }
        return ui.card(
            ui.heading(string(R.string.rules)),
            ui.labelled(R.string.rule_heat, ui.spinner(R.id.heat, words, draft.getInt("heat", 1))),
            ui.labelled(R.string.rule_battery, ui.spinner(R.id.battery, floors, draft.getInt("battery", 2))),
            ui.toggle(R.id.charging, R.string.rule_charging, draft.getBoolean("charging"), {}),
            ui.soft(string(R.string.rule_others, Words.bytes(host, Rules().diskFloorBytes))),
            gap = 10,
        )
    }

    /** What is set up survives a rotation and a look at another screen. */
    private fun keepDraft() {
        val steps: EditText = root.findViewById(R.id.steps) ?: return
        draft.putString("steps", steps.text.toString())
        draft.putString("rate", root.findViewById<EditText>(R.id.rate).text.toString())
        val model = root.findViewById<Spinner>(R.id.model).selectedItem
        val index = root.findViewById<Spinner>(R.id.data).selectedItemPosition
        draft.putString("model", model?.toString())
        draft.putString("data", app.store.trainable().getOrNull(index)?.let(app.store::nameOf))
        for ((key, id) in listOf("heat" to R.id.heat, "battery" to R.id.battery)) draft.putInt(key, root.findViewById<Spinner>(id).selectedItemPosition)
        for ((key, id) in listOf("start_from" to R.id.start_from, "charging" to R.id.charging)) {
            draft.putBoolean(key, root.findViewById<android.widget.Switch>(id).isChecked)
        }
    }

    private fun start(models: List<ArtifactInfo>, data: List<String>) {
        keepDraft()
        val steps = draft.getString("steps")?.toIntOrNull()
        val rate = draft.getString("rate")?.replace(',', '.')?.toDoubleOrNull()
        val stepsField: EditText = root.findViewById(R.id.steps)
        val rateField: EditText = root.findViewById(R.id.rate)
        stepsField.error = if (steps == null || steps < 1) string(R.string.steps_wrong) else null
        rateField.error = if (rate == null || !(rate > 0 && rate.isFinite())) string(R.string.rate_wrong) else null
        if (stepsField.error != null || rateField.error != null) return
        val model = models.first { it.name == draft.getString("model") }
        val floor = FLOORS[draft.getInt("battery")]
        val thermal = THERMAL[draft.getInt("heat")]
        val rules = Rules(
            pauseAtThermal = thermal, resumeBelowThermal = minOf(thermal, Thermal.MODERATE), batteryFloorPercent = floor,
            batteryResumePercent = minOf(100, floor + 5), onlyWhileCharging = draft.getBoolean("charging"),
        )
        val from = if (draft.getBoolean("start_from")) app.store.adapters(model.artifact!!).activeName() else null
        host.askToNotify()
        app.jobs.run(PLACE, string(R.string.preparing), {
            app.runs.begin(RunPlan(Runs.newId(), model.name, draft.getString("data") ?: data[0], steps!!, rate!!, rules, from))
        }) { startService() }
    }

    private fun startService(action: String? = null) {
        host.startForegroundService(TrainService.intent(host, action))
    }

    // Running

    private fun run(live: Runs.Live): View {
        val parts = arrayListOf<View>(ui.title(string(R.string.tab_train)))
        parts += ui.soft(string(R.string.run_of, live.plan.model, live.plan.data))
        val failure = live.error ?: (live.state as? TrainerState.Failed)?.error
        if (failure != null) {
            parts += ui.problem(failure)
            parts += ui.button(R.string.again, Tone.PRIMARY) {
                app.runs.again()
                startService()
            }.apply { id = R.id.again }
        }
        (live.state as? TrainerState.Finished)?.let { parts += outcome(live, it) }
        reasons = null
        if (!live.isOver) {
            bar = ProgressBar(host, null, android.R.attr.progressBarStyleHorizontal).apply {
                max = live.plan.steps
                progressTintList = android.content.res.ColorStateList.valueOf(ui.color(R.color.accent))
                importantForAccessibility = View.IMPORTANT_FOR_ACCESSIBILITY_NO
            }
            val head = ui.heading("").also { values[R.string.steps] = it }
            val card = ui.card(head, bar!!, gap = 6)
            if (live.state is TrainerState.Paused || live.pauseAsked) {
                reasons = ui.notice("")
                val size = LinearLayout.LayoutParams(LinearLayout.LayoutParams.MATCH_PARENT, LinearLayout.LayoutParams.WRAP_CONTENT)
                card.addView(reasons, size.apply { topMargin = ui.dp(8) })
            }
            parts += card
            parts += buttons(live)
        }
        chart = null
        if (failure == null || live.losses.isNotEmpty()) {
            chart = ChartView(host).apply { id = R.id.chart }
            parts += ui.card(ui.heading(string(R.string.loss)), chart!!, gap = 4)
            parts += facts()
        }
        if (live.isOver) {
            parts += ui.button(R.string.another, if (failure == null) Tone.PRIMARY else Tone.PLAIN) { app.runs.dismiss() }.apply { id = R.id.another }
        }
        update(live)
        return ui.page(R.id.page_train, *parts.toTypedArray())
    }

    private fun buttons(live: Runs.Live): View {
        val hold = if (live.pauseAsked) ui.button(R.string.resume, Tone.PRIMARY) { startService(TrainService.RESUME) }.apply { id = R.id.resume }
        else ui.button(R.string.pause) { startService(TrainService.PAUSE) }.apply { id = R.id.pause }
        return ui.row(hold, ui.button(R.string.stop, Tone.DANGER) { startService(TrainService.STOP) }.apply { id = R.id.stop })
    }

    private fun facts(): View {
        val rows = FACTS.map { label ->
            val row = ui.fact(string(label), string(R.string.unknown))
            values[label] = row.getChildAt(1) as TextView
            row
        }
        return ui.card(*rows.toTypedArray(), gap = 8)
    }

    private fun outcome(live: Runs.Live, state: TrainerState.Finished): View {
        val result = state.result
        val lines = arrayListOf(string(if (result.interrupted) R.string.stopped_after else R.string.finished_after, Words.number(result.steps)))
        val before = result.before
        val after = result.evaluation
        if (before != null && after != null) lines += string(R.string.judged, after.rows, Words.number(before.loss, 3), Words.number(after.loss, 3))
        val first = before?.accuracy
        val last = after?.accuracy
        if (first != null && last != null) lines += string(R.string.judged_accuracy, Words.number(first * 100, 0), Words.number(last * 100, 0))
        live.savedAdapter?.let { lines += string(R.string.saved_adapter, it) }
        return ui.notice(lines.joinToString("\n"), Tone.PRIMARY)
    }

    /** The numbers of now, in the views that are there. */
    private fun update(live: Runs.Live) {
        val state = live.state
        val done = Words.number(live.stepsDone)
        val all = Words.number(live.plan.steps)
        bar?.progress = live.stepsDone
        values[R.string.steps]?.text = when {
            state == null -> string(R.string.preparing)
            state is TrainerState.Running && state.activity == "evaluating" -> string(R.string.evaluating, done, all)
            else -> string(R.string.step_of, done, all)
        }
        val why = (state as? TrainerState.Paused)?.reasons?.joinToString("\n") { "• " + Words.reason(host, it) }
        reasons?.text = if (why == null) string(R.string.pausing) else string(R.string.paused_because, why)
        chart?.show(live.losses)
        val step = live.lastStep
        val health = app.health.now()
        val unknown = string(R.string.unknown)
        val speed = step?.let { string(R.string.speed_value, Words.number(it.stepsPerS, 2), Words.number(it.tokensPerS, 0)) }
        values[R.string.speed]?.text = speed ?: unknown
        values[R.string.time_left]?.text = if (live.isOver) unknown else step?.let { Words.duration(host, it.etaS) } ?: unknown
        values[R.string.memory]?.text = step?.let { Words.bytes(host, it.peakMemoryBytes) } ?: unknown
        val charge = if (health.charging) R.string.battery_charging else R.string.battery_value
        values[R.string.battery]?.text = health.batteryPercent?.let { string(charge, it) } ?: unknown
        val heat = health.thermalStatus?.let { Words.thermal(host, it) } ?: unknown
        val warmth = health.batteryCelsius?.let { string(R.string.temperature_value, Words.number(it.toDouble(), 1), heat) }
        values[R.string.temperature]?.text = warmth ?: heat
    }

    companion object {
        const val PLACE = "train"
        private val THERMAL = listOf(Thermal.MODERATE, Thermal.SEVERE, Thermal.CRITICAL)
        private val FLOORS = listOf(0, 10, 20, 30, 50)
        private val FACTS = listOf(R.string.speed, R.string.time_left, R.string.memory, R.string.battery, R.string.temperature)
    }
}
