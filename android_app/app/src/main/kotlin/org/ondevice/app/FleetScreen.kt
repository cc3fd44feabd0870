package org.ondevice.app

import android.app.AlertDialog
import android.content.Intent
import android.net.Uri
import android.view.View
import android.widget.ProgressBar
import android.widget.Spinner
import org.ondevice.core.FleetOffer
import org.ondevice.core.OndeviceException
import org.ondevice.core.Storage
import java.io.File

/** A fleet's rounds, which come and go as files: what a file asks for, the work on it, and the answer to share. */
class FleetScreen(host: MainActivity) : Screen(host) {
    private val watcher: () -> Unit = { render() }
    private var said: String? = null
    private var training = false
    private val isTraining get() = app.runs.live?.isOver == false

    /** A run that begins or ends opens or closes the round; its steps do not matter here. */
    private val runWatcher: () -> Unit = { if (training != isTraining) render() }

    override fun onShow() {
        app.jobs.watch(watcher)
        app.rounds.watch(watcher)
        app.runs.watch(runWatcher)
        if (app.rounds.standing == null && app.rounds.isMember && !app.rounds.isWorking) app.rounds.load()
    }

    override fun onHide() {
        app.jobs.unwatch(watcher)
        app.rounds.unwatch(watcher)
        app.runs.unwatch(runWatcher)
    }

    override fun onPicked(request: Int, uri: Uri) = open(uri, sent = false)

    /** A file that another app's share sheet or a file manager gave. */
    fun receive(uri: Uri) = open(uri, sent = true)

    private fun open(uri: Uri, sent: Boolean) {
        said = null
        app.rounds.open(uri, sent)
    }

    override fun content(): View {
        val parts = arrayListOf<View>(ui.title(string(R.string.tab_fleet)), ui.text(string(R.string.fleet_words), 14f, R.color.text_soft))
        app.jobs.error(PLACE)?.let { parts += ui.column(ui.problem(it), ui.button(R.string.dismiss) { app.jobs.dismiss(PLACE) }) }
        busy(PLACE)?.let { parts += it }
        val live = app.rounds.live
        if (live != null && !live.isOver) {
            parts += working(live)
            return ui.page(R.id.page_fleet, *parts.toTypedArray())
        }
        live?.error?.let { parts += ui.column(ui.problem(it), ui.button(R.string.dismiss) { app.rounds.dismiss() }) }
        live?.taken?.let { taken ->
            val loss = taken.loss?.let { string(R.string.fleet_loss, Words.number(it, 3)) }
            parts += ui.notice(listOfNotNull(string(R.string.fleet_taken, live.offer.name), loss).joinToString("\n"), Tone.PRIMARY)
        }
        val standing = app.rounds.standing
        standing?.answer?.let { parts += answer(it) }
        app.rounds.offer?.let { parts += offer(it) }
        val pick = ui.button(R.string.open_round, if (app.rounds.offer == null && standing?.answer == null) Tone.PRIMARY else Tone.PLAIN) { pick() }
        parts += pick.apply { id = R.id.open_round }
        if (standing != null) parts += standing(standing)
        else if (app.rounds.isMember && app.jobs.words(PLACE) == null) parts += leave(app.getString(R.string.unknown))
        else if (app.rounds.offer == null) parts += ui.empty(R.string.no_fleet, R.string.no_fleet_words)
        parts += ui.button(R.string.share_key) { shareKey() }.apply { id = R.id.share_key }
        return ui.page(R.id.page_fleet, *parts.toTypedArray())
    }

    /** A fleet that names its devices takes only replies that one of their keys signed. */
    private fun shareKey() {
        app.jobs.run(PLACE, string(R.string.packing), { app.rounds.publicKey() }) { share(it) }
    }

    private fun pick() = host.pick(Intent(Intent.ACTION_OPEN_DOCUMENT).addCategory(Intent.CATEGORY_OPENABLE).setType("*/*"), FILE)

    /** What a file asks for; nothing happens before the button. */
    private fun offer(offer: FleetOffer): View {
        val parts = arrayListOf<View>(ui.heading(offer.name), ui.fact(string(R.string.tab_fleet), "${offer.charter.name} · ${offer.charter.modelSource}"))
        if (offer.outcomes > 0) parts += ui.fact(string(R.string.fleet_outcomes), Words.number(offer.outcomes))
        val task = offer.task ?: return ui.card(*parts.toTypedArray(), button(R.string.take_over, true) { start(null, null) }, gap = 10)
        parts += ui.fact(string(R.string.fleet_round), Words.number(task.round))
        parts += ui.fact(string(R.string.local_steps), Words.number(task.localSteps))
        parts += ui.fact(string(R.string.begins_from), Storage.hex(task.begin))
        val models = app.rounds.models(offer.charter)
        val data = app.store.dataFiles()
        if (models.isEmpty()) {
            parts += ui.notice(string(R.string.fleet_no_model, offer.charter.modelSource))
            parts += ui.button(R.string.go_models) { host.open(0) }
        }
        if (data.isEmpty()) {
            parts += ui.notice(string(R.string.fleet_no_data))
            parts += ui.button(R.string.go_data) { host.open(1) }
        }
        if (models.isEmpty() || data.isEmpty()) return ui.card(*parts.toTypedArray(), gap = 10)
        val names = data.map { if (it == app.store.examples.file) string(R.string.own_examples) else "${it.name} (${Words.number(app.store.lines(it))})" }
        val model = ui.spinner(R.id.model, models.map { it.name }, chosen(R.id.model))
        val file = ui.spinner(R.id.data, names, chosen(R.id.data))
        parts += ui.labelled(R.string.model, model)
        parts += ui.labelled(R.string.fleet_rows, file)
        parts += ui.soft(string(R.string.fleet_tells))
        training = isTraining
        if (training) parts += ui.notice(string(R.string.fleet_while_training))
        parts += button(R.string.take_part, !training) { start(models[model.selectedItemPosition].name, data[file.selectedItemPosition].name) }
        return ui.card(*parts.toTypedArray(), gap = 10)
    }

    /** What is chosen now outlives a rebuild that background work causes. */
    private fun chosen(id: Int): Int = root.findViewById<Spinner>(id)?.selectedItemPosition ?: 0

    private fun button(label: Int, on: Boolean, action: () -> Unit): View =
        ui.button(label, Tone.PRIMARY) { action() }.apply { id = R.id.take_part }.also { ui.enable(it, on) }

    private fun start(model: String?, data: String?) {
        said = null
        host.askToNotify()
        app.rounds.begin(model, data)
        host.startForegroundService(TrainService.intent(host))
    }

    private fun working(live: FleetRounds.Live): View {
        val steps = live.offer.task?.localSteps ?: 1
        val bar = ProgressBar(host, null, android.R.attr.progressBarStyleHorizontal).apply {
            max = steps
            progress = live.step
            progressTintList = android.content.res.ColorStateList.valueOf(ui.color(R.color.accent))
            importantForAccessibility = View.IMPORTANT_FOR_ACCESSIBILITY_NO
        }
        val parts = arrayListOf<View>(ui.heading(live.offer.name), ui.text(string(R.string.local_step_of, Words.number(live.step), Words.number(steps)), 14f), bar)
        if (live.reasons.isNotEmpty()) parts += ui.notice(string(R.string.fleet_paused, live.reasons.joinToString("\n") { "• " + Words.reason(host, it) }))
        parts += ui.button(R.string.stop, Tone.DANGER) { host.startForegroundService(TrainService.intent(host, TrainService.STOP)) }.apply { id = R.id.stop }
        return ui.card(*parts.toTypedArray(), gap = 8)
    }

    private fun answer(file: File): View {
        val share = ui.button(R.string.share_answer, Tone.PRIMARY) { share(file) }.apply { id = R.id.share }
        return ui.card(ui.heading(string(R.string.answer_ready)), ui.soft("${file.name} · ${Words.bytes(host, file.length())}"), share)
    }

    private fun share(file: File) {
        val folder = ShareProvider.folder(host)
        app.jobs.run(PLACE, string(R.string.packing), {
            Storage.deleteTree(folder) // what was shared before is no longer needed
            File(folder, file.name).also { Storage.atomicWrite(it, file.readBytes()) }
        }) { host.startActivity(ShareProvider.intent(host, it)) }
    }

    private fun standing(standing: FleetRounds.Standing): View {
        val parts = arrayListOf<View>(
            ui.heading(string(R.string.fleet_standing)),
            ui.fact(string(R.string.tab_fleet), "${standing.charter.name} · ${standing.charter.modelSource}"),
            ui.fact(string(R.string.fleet_followed), Words.number(standing.rounds)),
            ui.fact(string(R.string.fleet_hash), standing.hash),
        )
        said?.let { parts += ui.notice(it, Tone.PRIMARY) }
        if (standing.rounds > 0) app.rounds.models(standing.charter).firstOrNull()?.let { model ->
            parts += ui.button(R.string.fleet_use) {
                try {
                    said = string(R.string.saved_adapter, app.rounds.save(model))
                    render()
                } catch (error: OndeviceException) {
                    app.jobs.fail(PLACE, error)
                }
            }.apply { id = R.id.save }
        }
        parts += leave(standing.charter.name)
        return ui.card(*parts.toTypedArray(), gap = 8)
    }

    private fun leave(fleet: String): View = ui.button(R.string.leave_fleet, Tone.DANGER) {
        AlertDialog.Builder(host).setMessage(string(R.string.leave_ask, fleet))
            .setNegativeButton(R.string.cancel, null)
            .setPositiveButton(R.string.leave_fleet) { _: android.content.DialogInterface, _: Int ->
                app.jobs.dismiss(PLACE)
                app.rounds.leave()
            }
            .show()
    }.apply { id = R.id.delete }

    companion object {
        const val PLACE = "fleet"
        const val FILE = 1
    }
}
