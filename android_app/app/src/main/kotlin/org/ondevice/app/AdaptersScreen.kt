package org.ondevice.app

import android.app.AlertDialog
import android.text.format.DateUtils
import android.view.View
import org.ondevice.core.AdapterInfo
import org.ondevice.core.Adapters
import org.ondevice.core.ArtifactInfo
import org.ondevice.core.OndeviceException
import org.ondevice.core.Storage
import java.io.File
import java.io.FileOutputStream

/** What was learned: one adapter for each run; which is in use, and ways to share, delete and go back. */
class AdaptersScreen(host: MainActivity) : Screen(host) {
    private val watcher: () -> Unit = { render() }

    override fun onShow() = app.jobs.watch(watcher)

    override fun onHide() = app.jobs.unwatch(watcher)

    override fun content(): View {
        val parts = arrayListOf<View>(ui.title(string(R.string.tab_adapters)))
        parts += ui.text(string(R.string.adapters_words), 14f, R.color.text_soft)
        app.jobs.error(PLACE)?.let { error ->
            parts += ui.column(ui.problem(error), ui.button(R.string.dismiss) { app.jobs.dismiss(PLACE) })
        }
        app.jobs.words(PLACE)?.let { parts += ui.busy(it) }
        var found = 0
        for (model in app.store.models().filter { it.manifest != null }) {
            val adapters = app.store.adapters(model.artifact!!)
            val list = adapters.list()
            if (list.isEmpty()) continue
            found += list.size
            parts += head(model, adapters)
            list.forEach { parts += card(model, adapters, it) }
        }
        if (found == 0) {
            parts += ui.empty(R.string.no_adapters, R.string.no_adapters_words)
            parts += ui.button(R.string.go_train, Tone.PRIMARY) { host.openTrain() }
        }
        return ui.page(R.id.page_adapters, *parts.toTypedArray())
    }

    private fun head(model: ArtifactInfo, adapters: Adapters): View {
        val active = adapters.activeName()
        val words = ui.column(ui.heading(model.name), ui.soft(string(R.string.in_use, active ?: string(R.string.base_model))), gap = 2)
        val back = ui.button(R.string.roll_back) {
            act { adapters.rollBack() }
        }.apply { id = R.id.roll_back }
        return if (active == null) words else ui.column(words, back, gap = 8)
    }

    private fun card(model: ArtifactInfo, adapters: Adapters, adapter: AdapterInfo): View {
        val parts = arrayListOf<View>(ui.heading(adapter.name))
        val now = System.currentTimeMillis()
        val isNew = now - adapter.savedAtMs < DateUtils.MINUTE_IN_MILLIS
        val age = if (isNew) string(R.string.just_now) else DateUtils.getRelativeTimeSpanString(adapter.savedAtMs, now, DateUtils.MINUTE_IN_MILLIS)
        parts += ui.soft("$age · ${Words.bytes(host, adapter.sizeBytes)}")
        adapter.problem?.let { parts += ui.problem(it) }
        figures(adapter)?.let { parts += ui.text(it, 14f) }
        if (adapter.active) parts += ui.notice(string(R.string.is_in_use), Tone.PRIMARY)
        val use = ui.button(R.string.use) { act { adapters.activate(adapter.name) } }
        use.contentDescription = string(R.string.use_named, adapter.name)
        val share = ui.button(R.string.share) { share(model, adapters, adapter) }.apply {
            id = R.id.share
            contentDescription = string(R.string.share_named, adapter.name)
        }
        val delete = ui.button(R.string.delete, Tone.DANGER) { delete(adapters, adapter) }
        delete.contentDescription = string(R.string.delete_named, adapter.name)
        val usable = adapter.problem == null
        val buttons = listOfNotNull(use.takeIf { usable && !adapter.active }, share.takeIf { usable }, delete)
        parts += ui.row(*buttons.toTypedArray())
        return ui.card(*parts.toTypedArray(), gap = 8)
    }

    private fun figures(adapter: AdapterInfo): String? {
        val note = adapter.note
        val steps = (note["steps"] as? Number)?.toInt() ?: return null
        val first = (note["loss_before"] ?: note["first_loss"]) as? Number ?: return null
        val last = (note["loss_after"] ?: note["final_loss"]) as? Number ?: return null
        return string(R.string.adapter_figures, Words.number(steps), Words.number(first.toDouble(), 3), Words.number(last.toDouble(), 3))
    }

    private fun act(action: () -> Unit) {
        try {
            action()
        } catch (error: OndeviceException) {
            app.jobs.fail(PLACE, error)
            return
        }
        app.jobs.dismiss(PLACE)
        render()
    }

    private fun share(model: ArtifactInfo, adapters: Adapters, adapter: AdapterInfo) {
        val folder = ShareProvider.folder(host)
        app.jobs.run(PLACE, string(R.string.packing), {
            Storage.deleteTree(folder) // what was shared before is no longer needed
            if (!folder.mkdirs() && !folder.isDirectory) throw java.io.IOException("cannot make $folder")
            File(folder, "${model.name} - ${adapter.name}.zip").also { file -> FileOutputStream(file).use { adapters.zip(adapter.name, it) } }
        }) { file -> host.startActivity(ShareProvider.intent(host, file)) }
    }

    private fun delete(adapters: Adapters, adapter: AdapterInfo) {
        AlertDialog.Builder(host).setMessage(string(R.string.delete_ask, adapter.name))
            .setNegativeButton(R.string.cancel, null)
            .setPositiveButton(R.string.delete) { _: android.content.DialogInterface, _: Int -> act { adapters.delete(adapter.name) } }
            .show()
    }

    companion object {
        const val PLACE = "adapters"
    }
}
